"""What is said where a package of an extra is missing."""

import pytest

from planner.core import extras
from planner.core.errors import ExitCode, MissingPackageError
from planner.core.extras import check_for_configurations, check_installed, importing, install_command


def leave_only(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """No other package can be found."""
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name in installed else None)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ((), "jax, libtpu and torchax are not installed, which TPUs need"),
        (("libtpu",), "jax and torchax are not installed, which TPUs need"),
        (("jax", "libtpu"), "torchax is not installed, which TPUs need"),
    ],
)
def test_all_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], message: str
) -> None:
    """And the command; there is no answer without it."""
    leave_only(monkeypatch, *installed)
    with pytest.raises(MissingPackageError) as refused:
        check_installed("tpu")
    assert (refused.value.message, refused.value.hint) == (message, "pip install 'gpipe-plan[tpu]'")
    assert refused.value.exit_code == ExitCode.ERROR


def test_the_torch_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra would have pip replace one of another release: so the rest is named."""
    leave_only(monkeypatch)
    assert install_command("train") == "pip install 'gpipe-plan[train]'"
    leave_only(monkeypatch, "torch")
    assert install_command("train") == "pip install fvcore networkx safetensors"
    leave_only(monkeypatch, "torch", "fvcore", "networkx", "safetensors")
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
def test_a_configuration_needs_transformers_too(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], missing: str, hint: str
) -> None:
    """It is in no extra: the command names it."""
    leave_only(monkeypatch, *installed)
    with pytest.raises(MissingPackageError) as refused:
        check_for_configurations()
    assert refused.value.message == f"{missing} not installed, which building the model of a config.json needs"
    assert refused.value.hint == hint


def test_an_import_that_fails_for_another_reason_fails_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of ours that does not exist, or a package that is in no extra, is not to be installed so."""
    leave_only(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), importing("train"):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(MissingPackageError, match="torch, fvcore, networkx and safetensors"), importing("train"):
        raise ModuleNotFoundError(name="torch.nn")
