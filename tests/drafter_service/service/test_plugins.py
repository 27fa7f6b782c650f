from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from fakes import plugin_drafters
from fakes.plugin_drafters import entry_point
from outrider.drafter_service.service.plugins import PLUGIN_GROUP, installed_plugins, load_factory


def test_a_plug_in_is_found_by_its_name():
    plugins = [entry_point("first", "reading_states"), entry_point("second")]
    assert load_factory("second", plugins) is plugin_drafters.build


@pytest.mark.parametrize(
    ("plugins", "text"),
    [
        ([], f"^plugin: no installed package has an entry point 'mine' of the group {PLUGIN_GROUP}$"),
        ([entry_point("other")], "no installed package"),
        ([entry_point("mine"), entry_point("mine", "needy")], "2 packages have an entry point 'mine'"),
        ([entry_point("mine", module="no.such.module")], "'mine': no.such.module:build .*ModuleNotFoundError: "),
        ([entry_point("mine", "missing")], "'mine': .*:missing cannot be imported: AttributeError: .*missing"),
        ([entry_point("mine", "NO_FACTORY")], "'mine': .*:NO_FACTORY is no factory of drafters but a int"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_its_name_and_cause(plugins: list[EntryPoint], text: str):
    with pytest.raises(ValueError, match=text):
        load_factory("mine", plugins)


def test_only_this_group_is_searched():
    assert {plugin.group for plugin in installed_plugins()} <= {PLUGIN_GROUP}
    assert installed_plugins() is installed_plugins()
