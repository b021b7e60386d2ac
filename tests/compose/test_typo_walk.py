"""A slip of the finger in any config key, option, member, group or preset is answered with the right word.

Every key of every component is walked, nested models and sections included, on the command line and in a YAML file. A
word is misspelt in four ways: a letter left out, two swapped, one doubled, the case wrong. Words of one or two letters
(`n`) are left out of the first two: what remains of them looks like nothing. So are slips that make another legal word.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from core.assembly import describe
from core.components import CHAINS, GROUPS
from core.config.compose import compose
from core.errors import ConfigError
from core.other_names import NOUNS
from core.plugins import Plugins, load_plugins
from core.session import open_session
from core.settings import SECTIONS, ModelSettings, Settings, settings_class

GLOBAL = "# @package _global_\n"


def left_out(word: str) -> str:
    middle = len(word) // 2
    return word[:middle] + word[middle + 1 :] if len(word) > 2 else word


def swapped(word: str) -> str:
    pairs = [i for i in range(len(word) - 1) if word[i] != word[i + 1] and "_" not in word[i : i + 2]]
    if len(word) < 3 or not pairs:
        return word
    i = pairs[len(pairs) // 2]
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def doubled(word: str) -> str:
    middle = len(word) // 2
    return word[: middle + 1] + word[middle:]


def wrong_case(word: str) -> str:
    return word.upper()


SLIPS = (left_out, swapped, doubled, wrong_case)
Slip = Callable[[str], str]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def keys_under(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Keys of a settings class and of the models inside it, found by their default values."""
    defaults = model.model_construct()
    for name in model.model_fields:
        yield (name,)
        inner = getattr(defaults, name, None)
        if isinstance(inner, BaseModel):
            yield from ((name, *key) for key in keys_under(type(inner)))


def places(plugins: Plugins) -> Iterator[tuple[list[str], str, list[tuple[str, ...]]]]:
    """(words that select a component, its config path, its keys), for all components, then the sections."""
    for group in (*GROUPS, *CHAINS):
        for provided in plugins.components(group):
            name = provided.component.name
            keys = list(keys_under(settings_class(provided)))
            shared = list(keys_under(ModelSettings)) if group == "model" else []
            chain = group in CHAINS
            choice = [f"{group}=[{name}]"] if chain else [f"{group}={name}"]
            yield choice, f"{group}.{name}" if chain else group, shared + keys
    for section, model in SECTIONS.items():
        yield [], section, list(keys_under(model))


def slips_of(keys: list[tuple[str, ...]], slip: Slip) -> dict[tuple[str, ...], str]:
    """Misspelt key -> the right last word; without those that do not look misspelt."""
    legal = set(keys)
    made = {(*key[:-1], slip(key[-1])): key[-1] for key in keys}
    return {key: right for key, right in made.items() if key not in legal}


def nested(path: str, values: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        node = tree
        for word in (*path.split("."), *key)[:-1]:
            node = node.setdefault(word, {})
        node[key[-1]] = value
    return tree


class Mine:
    """A folder with one preset of one's own."""

    def __init__(self, folder: Path):
        (folder / "preset").mkdir(exist_ok=True)
        self.folder = folder

    def words(self, content: dict[str, Any], defaults: list[Any] | None = None) -> list[str]:
        """Arguments that apply a preset with this content."""
        content = {**({"defaults": defaults} if defaults else {}), **content}
        (self.folder / "preset/mine.yaml").write_text(GLOBAL + yaml.safe_dump(content, sort_keys=False), "utf-8")
        return [f"config_dir={self.folder}", "+preset=mine"]


@pytest.fixture
def mine(tmp_path: Path) -> Mine:
    return Mine(tmp_path)


def refusal(words: list[str], plugins: Plugins) -> str:
    """What `open_session` says, without loading plugins again."""
    with pytest.raises(ConfigError) as caught:
        config = compose(words, plugins)
        with config.naming_files():
            describe(Settings.from_config(config.values), plugins)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def offered(message: str, wrong: str) -> list[str]:
    """What is offered for one unknown key."""
    found = re.search(rf"'{re.escape(wrong)}'[^;]*; did you mean ([^?]*)\?", message)
    assert found, f"{wrong}: no near match in {message!r}"
    return found[1].split(", ")


@pytest.mark.parametrize("slip", SLIPS)
def test_every_key_on_the_command_line(plugins, slip):
    walked = 0
    for choice, path, keys in places(plugins):
        slips = slips_of(keys, slip)
        message = refusal([*choice, *(f"{path}.{'.'.join(key)}=1" for key in slips)], plugins) if slips else ""
        for key, right in slips.items():
            assert right in offered(message, ".".join([path, *key]))
        walked += len(slips)
    assert walked > 120


@pytest.mark.parametrize("slip", SLIPS)
def test_every_key_in_a_file_which_is_named(plugins, mine, slip):
    for choice, path, keys in places(plugins):
        slips = slips_of(keys, slip)
        if not slips:
            continue
        content = nested(path, dict.fromkeys(slips, 1))
        message = refusal([*mine.words(content), *choice], plugins)
        for key, right in slips.items():
            assert right in offered(message, ".".join([path, *key]))
        assert f"(set in {mine.folder}/preset/mine.yaml (config_dir))" in message


def test_every_key_alone_as_a_user_would_see_it(plugins):
    """One slip per key, each in turn, through the door that `serve` uses."""
    number = 0
    for choice, path, keys in places(plugins):
        for key in keys:
            number += 1
            slips = slips_of([key], SLIPS[number % len(SLIPS)])
            for wrong, right in slips.items():
                full = ".".join([path, *wrong])
                with pytest.raises(ConfigError) as caught:
                    open_session([*choice, f"{full}=1"])
                assert caught.value.key == full
                assert str(caught.value).startswith(f"unknown config key '{full}'; did you mean ")
                assert right in offered(str(caught.value), full)


def test_the_walk_leaves_out_nothing_that_explain_shows(plugins, capsys):
    from core.commands.explain import run

    walked = {".".join(key) for _, _, keys in places(plugins) for key in keys}
    assert run(["--all"]) == 0
    shown = {line.split(" = ")[0].strip() for line in capsys.readouterr().out.splitlines() if " = " in line}
    assert len(shown) > 60 and shown - {"name"} <= walked


def choices(plugins: Plugins) -> Iterator[tuple[str, str]]:
    for group in (*GROUPS, *CHAINS):
        for name in plugins.names(group):
            yield group, name


def wrong_options(plugins: Plugins, slips_each: int) -> Iterator[tuple[str, str, str]]:
    """(group, wrong, right) for every option, with some of the four slips, in turn."""
    turn = itertools.cycle(SLIPS)
    for group, right in choices(plugins):
        for slip in itertools.islice(turn, slips_each):
            if slip(right) != right and slip(right) not in plugins.names(group):
                yield group, slip(right), right


def test_every_option_on_the_command_line(plugins):
    for group, wrong, right in wrong_options(plugins, slips_each=4):
        forms = [f"{group}={wrong}", f"+{group}={wrong}"]
        if group in CHAINS:
            forms = [f"{group}=[{wrong}]", f"{group}={wrong}", f"+{group}=[{right},{wrong}]"]
        for form in forms:
            message = refusal([form], plugins)
            assert message.startswith(f"no {NOUNS.get(group, group)} is called ")
            assert right in offered(message, wrong)


def test_every_option_by_its_key(plugins):
    """`scheduler.name=fcsf`, `observers.promethues.x=1`: the full key is named."""
    for group, wrong, right in wrong_options(plugins, slips_each=1):
        key = f"{group}.{wrong}" if group in CHAINS else f"{group}.name"
        message = refusal([f"{key}={{}}" if group in CHAINS else f"{key}={wrong}"], plugins)
        assert message.startswith(f"config key '{key}': no {NOUNS.get(group, group)} is called ")
        assert right in offered(message.removeprefix(f"config key '{key}': "), wrong)


def test_every_option_in_a_file(plugins, mine):
    for number, (group, wrong, right) in enumerate(wrong_options(plugins, slips_each=1)):
        override: dict[str, Any] = {f"override /{group}": [wrong] if group in CHAINS and number % 2 else wrong}
        content: dict[str, Any] = {group: {wrong: {}} if group in CHAINS else {"name": wrong}}
        for words in (mine.words({}, [override]), mine.words(content)):
            message = refusal(words, plugins)
            assert right in re.search(r"; did you mean ([^?]*)\?", message)[1].split(", "), message
            assert f"(set in {mine.folder}/preset/mine.yaml (config_dir))" in message


def wrong_roots(slips_each: int) -> Iterator[tuple[str, str]]:
    turn = itertools.cycle(SLIPS)
    for right in (*GROUPS, *CHAINS, *SECTIONS, "preset"):
        for slip in itertools.islice(turn, slips_each):
            yield slip(right), right


def test_every_group_chain_and_section_on_the_command_line(plugins):
    for number, (wrong, right) in enumerate(wrong_roots(slips_each=4)):
        forms = ((f"{wrong}=x", wrong), (f"+{wrong}=x", wrong), (f"{wrong}.key=1", f"{wrong}.key"))
        for form, said in forms if number % 4 == 0 else forms[:1]:
            message = refusal([form], plugins)
            assert message.startswith(f"unknown config key '{said}'; did you mean ")
            near = offered(message, said)
            assert right in near or any(key.startswith(f"{right}.") for key in near)


def test_every_group_chain_and_section_in_a_file(plugins, mine):
    for wrong, right in wrong_roots(slips_each=1):
        if right == "preset":
            continue
        message = refusal(mine.words({wrong: {"key": 1}}), plugins)
        assert right in offered(message, wrong)
        if right not in SECTIONS:
            message = refusal(mine.words({}, [{f"override /{wrong}": "x"}]), plugins)
            assert right in re.search(r"; did you mean ([^?]*)\?", message)[1].split(", "), message


def test_every_preset(plugins, mine):
    (mine.folder / "preset/night_shift.yaml").write_text(GLOBAL + "scheduler:\n  max_num_running_reqs: 2\n", "utf-8")
    for right in ("chat", "night_shift"):
        for slip in SLIPS:
            for form in (f"+preset={slip(right)}", f"preset={slip(right)}", f"+preset=[{right},{slip(right)}]"):
                message = refusal([f"config_dir={mine.folder}", form], plugins)
                assert right in offered(message, slip(right))


def test_a_key_without_its_group_is_led_to_the_full_one(plugins):
    """`port=8123` leads to frontend.port, `limits.connections=1` to frontend.limits.connections; misspelt ones, too."""
    config = compose([], plugins)
    groups = {config.values[group]["name"]: group for group in GROUPS}
    full = [
        (path, key)
        for choice, path, keys in places(plugins)
        if not choice or any(group == path and name in choice[0] for name, group in groups.items())
        for key in keys
    ]
    ends = [key[-1] for _, key in full]
    assert len(full) > 60
    for path, key in full:
        if key[-1] not in (*GROUPS, *CHAINS) and ends.count(key[-1]) <= 3:
            assert ".".join([path, *key]) in offered(refusal([f"{key[-1]}=1"], plugins), key[-1])
        if len(key) > 1:
            assert offered(refusal([f"{'.'.join(key)}=1"], plugins), ".".join(key)) == [".".join([path, *key])]
    for wrong in ("prot", "porrt", "PORT"):
        assert "frontend.port" in offered(refusal([f"{wrong}=8123"], plugins), wrong)


def test_which_components_are_selected_decides_what_is_offered(plugins):
    assert "frontend.system" in offered(refusal(["frontend=chat_cli", "system=x"], plugins), "system")
    assert "frontend.system" not in refusal(["system=x"], plugins)
    assert "frontend.port" in refusal(["port=1", "scheduler=nonsense"], plugins), "another mistake beside it"


def test_every_value_of_a_few_is_answered_with_all_of_them(plugins):
    walked = 0
    models = [(choice, path, settings_class(p)) for choice, path, p in _components(plugins)]
    for choice, path, model in [*models, ([], "model", ModelSettings), *(([], s, m) for s, m in SECTIONS.items())]:
        for name, field in model.model_fields.items():
            legal = [v for v in get_args(field.annotation) if get_origin(field.annotation) is Literal]
            for right in (value for value in legal if isinstance(value, str) and len(value) > 2):
                for slip in SLIPS:
                    message = refusal([*choice, f"{path}.{name}={slip(right)}"], plugins)
                    assert message.startswith(f"config key '{path}.{name}': ")
                    assert all(repr(value) in message for value in legal)
                    assert right in re.search(r"; did you mean ([^?]*)\?", message)[1].split(", ")
                    walked += 1
    assert walked >= 4 * len(("restart", "exit", "auto", "float32", "openai", "model", "refuse", "disable"))


def _components(plugins: Plugins) -> Iterator[tuple[list[str], str, Any]]:
    for group in GROUPS:
        for provided in plugins.components(group):
            yield [f"{group}={provided.component.name}"], group, provided
