"""The light module that `settings` names is not light."""

from core.hookspecs import Component, hookimpl

CAUGHT_BY = "test_settings_and_params_are_in_light_modules"
NONET_API = "1.1"
FILES = {
    "bad_heavy_settings.py": "import torch\nfrom core.stages.decode import Plain\n\nSettings = Plain.Settings\n",
}


@hookimpl
def provide_decodes():
    yield Component(
        "bad_settings", "core.stages.decode:Plain", "one token per step", settings="bad_heavy_settings:Settings"
    )
