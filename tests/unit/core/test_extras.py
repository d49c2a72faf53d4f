"""Errors about missing packages of an extra."""

import pytest

from planner.core import extras
from planner.core.errors import ExitCode, MissingPackageError
from planner.core.extras import check_configuration_packages, check_installed, importing, install_command


def hide_other_packages(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """Make all packages but these appear missing."""
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name in installed else None)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ((), "jax, libtpu and torchax are not installed, which TPUs need"),
        (("libtpu",), "jax and torchax are not installed, which TPUs need"),
        (("jax", "libtpu"), "torchax is not installed, which TPUs need"),
    ],
)
def test_error_lists_all_missing_packages(monkeypatch, installed, message):
    hide_other_packages(monkeypatch, *installed)
    with pytest.raises(MissingPackageError) as refused:
        check_installed("tpu")
    assert (refused.value.message, refused.value.hint) == (message, "pip install 'gpipe-plan[tpu]'")
    assert refused.value.exit_code == ExitCode.ERROR


def test_install_command_keeps_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra would make pip replace torch of another release."""
    hide_other_packages(monkeypatch)
    assert install_command("train") == "pip install 'gpipe-plan[train]'"
    hide_other_packages(monkeypatch, "torch")
    assert install_command("train") == "pip install fvcore networkx safetensors"
    hide_other_packages(monkeypatch, "torch", "fvcore", "networkx", "safetensors")
    check_installed("train")


@pytest.mark.parametrize(
    ("installed", "missing", "hint"),
    [
        (("torch", "fvcore", "networkx", "safetensors"), "transformers is", "pip install transformers"),
        (("torch", "fvcore", "networkx"), "safetensors and transformers are", "pip install safetensors transformers"),
        (("transformers",), "torch, fvcore, networkx and safetensors are", "pip install 'gpipe-plan[train]'"),
        (
            (),
            "torch, fvcore, networkx, safetensors and transformers are",
            "pip install 'gpipe-plan[train]' transformers",
        ),
    ],
)
def test_configurations_need_transformers(monkeypatch, installed, missing, hint):
    """No extra contains transformers."""
    hide_other_packages(monkeypatch, *installed)
    with pytest.raises(MissingPackageError) as refused:
        check_configuration_packages()
    assert refused.value.message == f"{missing} not installed, which building the model of a config.json needs"
    assert refused.value.hint == hint


def test_other_import_errors_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_other_packages(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), importing("train"):
        import no_such_module  # noqa: F401
    with pytest.raises(MissingPackageError, match="torch, fvcore, networkx and safetensors"), importing("train"):
        raise ModuleNotFoundError(name="torch.nn")
