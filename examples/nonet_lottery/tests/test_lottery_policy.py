"""What is special about the lottery. Delete this file when you change the policy, and test what yours promises."""

from collections import Counter

from core.request import Request
from core.testing.fakes import make_request
from core.testing.scheduler import SchedulerContract

from nonet_lottery.lottery import Lottery, LotteryPolicy


class LotteryEngines(SchedulerContract):
    """For its `make_engine`; by its name pytest does not take it for tests."""

    component = Lottery
    settings = {"tenant_tickets": {"t": 3}}


def test_a_winner_without_room_is_not_overtaken():
    """One large request among a steady stream of small ones, which always find room."""
    engine = LotteryEngines().make_engine(8, prefix_caching=False)
    large = make_request("large", [1] * 100, 4)
    engine.add(*(make_request(f"a{index}", [index] * 20, 10) for index in range(4)), large)
    for index in range(400):
        engine.add(make_request(f"b{index}", [index % 50] * 20, 4))
        engine.step()
    assert large.is_finished
    engine.drain()


def draws(num_draws: int, **settings: object) -> Counter[str]:
    """How often each of three tenants and a better priority comes first, when all of them wait at each draw."""
    policy = LotteryPolicy(Lottery.Settings.model_validate(settings))
    return Counter(policy_winner(policy, turn) for turn in range(num_draws))


def policy_winner(policy: LotteryPolicy, turn: int) -> str:
    waiting: list[Request] = [make_request(f"{turn}-{name}", [1], tenant=name) for name in ("bronze", "silver", "gold")]
    waiting.append(make_request(f"{turn}-urgent", [1], tenant="urgent", priority=-2))
    return policy.waiting_order(waiting)[0].tenant


def test_wins_are_in_proportion_to_tickets():
    wins = draws(4000, tickets=1, tenant_tickets={"silver": 2, "gold": 3})  # urgent: 1 * 2**2; 10 tickets in all
    for tenant, tickets in {"bronze": 1, "silver": 2, "gold": 3, "urgent": 4}.items():
        assert abs(wins[tenant] - 400 * tickets) < 120  # four standard deviations


def test_the_same_seed_draws_the_same():
    assert draws(50, seed=1) == draws(50, seed=1) != draws(50, seed=2)


def test_no_priority_breaks_the_draw():
    policy = LotteryPolicy(Lottery.Settings())
    extremes = [make_request(str(priority), [1], priority=priority) for priority in (-(10**9), 0, 10**9)]
    assert [request.priority for request in policy.waiting_order(extremes)] == [-(10**9), 0, 10**9]


def test_preempted_requests_come_first_in_their_old_order():
    policy = LotteryPolicy(Lottery.Settings(tenant_tickets={"gold": 1000}))
    waiting = [make_request(name, [1], tenant="gold") for name in "abcd"]
    waiting[1].num_preemptions = waiting[3].num_preemptions = 1
    assert [request.request_id for request in policy.waiting_order(waiting)][:2] == ["b", "d"]
