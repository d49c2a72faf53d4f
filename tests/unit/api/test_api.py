"""Commands as functions: same names and defaults, values or paths, and names that are also subpackages."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import planner
from planner import files
from planner.core.errors import FileError, InfeasibleError, StaleError, UsageError
from planner.core.values.cluster import Link
from planner.core.values.profile import Model
from tests.support import gate
from tests.support.cli import environment
from tests.support.docs import blocks
from tests.support.profiles import profile_of

VERBS = sorted(set(planner.__all__) - {"__version__", "Plan", "PlannerError", "Profile"})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with profile.yaml and plan.yaml."""
    monkeypatch.chdir(tmp_path)
    gate.write(tmp_path)
    return tmp_path


def python(program: str) -> str:
    """Return the output of `program` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names and defaults

PRINTING = {"format", "quiet", "debug"}
"""Options that only the command line has, except for the `--format` of `emit`."""

ELSEWHERE = {
    # In Python these names belong to built-in functions; as on the command line they may be repeated.
    "profile": {"set": "settings", "input": "inputs"},
    "emit": {"format": "engine"},
}


def command_options(verb: str) -> dict[str, Any]:
    """Return options and arguments of a command with their defaults, by typed name."""
    found = {}
    for name, parameter in inspect.signature(getattr(import_module(f"planner.cli.{verb}"), verb)).parameters.items():
        declared = [item for item in get_args(parameter.annotation) if isinstance(item, typer.models.OptionInfo)]
        typed = [text for item in declared for text in item.param_decls or () if text.startswith("--")]
        option = typed[0].removeprefix("--").replace("-", "_") if typed else name.rstrip("_")
        found[ELSEWHERE.get(verb, {}).get(option, option)] = parameter.default
    return {name: default for name, default in found.items() if name not in PRINTING}


@pytest.mark.parametrize("verb", ["profile", "solve", "emit", "check", "explore", "verify", "compare", "sweep"])
def test_functions_have_the_options_of_their_commands(verb: str) -> None:
    """Functions have the same defaults, but write a file only if one is named."""
    parameters = inspect.signature(getattr(planner, verb)).parameters
    ours = {name: p.default for name, p in parameters.items() if name != "progress"}
    theirs = command_options(verb)
    for more in (
        "example_batch",
        "loss_fn",
        "note",
        "warn",
        "watch",
    ):  # for models that are no file, and what is printed there
        ours.pop(more, None)
    assert set(ours) == set(theirs)
    for name, default in ours.items():
        if (name == "output" and verb != "emit") or (verb == "verify" and name == "calibration"):
            assert default is None
        elif default or theirs[name]:
            assert theirs[name] in (default, [default]), name  # `solve` takes several profiles


@pytest.mark.parametrize("verb", VERBS)
def test_functions_are_documented_and_typed(verb: str) -> None:
    function = getattr(planner, verb)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for name, parameter in signature.parameters.items():
        assert parameter.annotation is not inspect.Parameter.empty
        assert re.search(rf"^ +{name}: \S", function.__doc__, re.MULTILINE), name


@pytest.mark.parametrize("verb", ["profile", "solve", "emit", "check", "explore", "verify", "sweep"])
def test_unknown_keywords_are_refused_with_a_suggestion(verb: str) -> None:
    known = "output" if "output" in inspect.signature(getattr(planner, verb)).parameters else "profile"
    message = rf"{verb}\(\) got an unexpected keyword argument `{known}s`; did you mean `{known}`"
    with pytest.raises(TypeError, match=message):
        getattr(planner, verb)("nowhere.yaml", **{f"{known}s": 2})


# Import


def test_importing_the_package_imports_no_dependency() -> None:
    """The three subpackages whose names are functions are imported."""
    program = "import sys, planner; print([m for m in sys.modules if m.partition('.')[0] in {!r}])"
    heavy = ("torch", "numpy", "rich", "typer", "pydantic", "yaml")
    assert python(program.format(heavy)) == "[]\n"
    program = "import sys, planner; print(sorted(m for m in sys.modules if m.count('planner.')))"
    assert python(program) == f"{['planner.emit', 'planner.profile', 'planner.solve']}\n"


def test_solve_check_and_compare_do_not_import_torch() -> None:
    program = (
        "import sys, planner; assert {'check', 'solve', 'profile'} < set(dir(planner)); "
        "planner.check; planner.solve; planner.compare; planner.sweep; planner.emit; print('torch' in sys.modules)"
    )
    assert python(program) == "False\n"


ORDERS = {
    "the function": "import planner; f = planner.solve",
    "from the package": "from planner import solve as f",
    "the subpackage": "import planner.solve; f = planner.solve",
    "a name in it": "from planner.solve import Request; import planner; f = planner.solve",
    "a module in it": "from planner.solve.search import Request; import planner; f = planner.solve",
}


@pytest.mark.slow
@pytest.mark.parametrize("first", ORDERS)
def test_solve_is_a_function_and_a_subpackage_in_any_import_order(here: Path, first: str) -> None:
    others = (way for name, way in ORDERS.items() if name != first)
    call = f"assert type(f({str(here / 'profile.yaml')!r}, devices=2, mem='2MB', batch=4)).__name__ == 'Plan'"
    lines = [ORDERS[first], call, *(f"{way}\n{call}" for way in others)]
    lines += ["from planner.api.solving import solve", "from planner.solve import Request"]
    lines += ["assert planner.solve is solve"]
    python("\n".join(lines))


def test_every_command_is_a_function() -> None:
    for verb in VERBS:
        assert getattr(planner, verb).__module__.startswith("planner.api.")
    with pytest.raises(AttributeError, match="slove"):
        planner.slove  # noqa: B018


# Values and paths


def test_values_and_paths_give_the_same_answers(here: Path) -> None:
    read = files.read_profile("profile.yaml")
    plans = [
        planner.solve(given, devices=2, mem="2MB", batch=4) for given in (read, "profile.yaml", Path("profile.yaml"))
    ]
    assert len({files.digest_of(plan.stages) for plan in plans}) == 1
    assert planner.solve(read, devices=2, mem=2_000_000, batch=4) == plans[0]
    assert planner.solve(read, devices=2, mem=["2MB", 2_000_000], batch=4) == plans[0]
    verdicts = [planner.check(given, profile=read) for given in (files.read_plan("plan.yaml"), "plan.yaml")]
    assert verdicts[0] == verdicts[1]
    assert planner.check().fits


def test_option_values_equal_their_texts(here: Path) -> None:
    texts = planner.solve(
        devices=3, mem="2MB", batch=4, link="1GB/s,5us", headroom="5%", balance="2,2,2", micro_batches="4"
    )
    values = planner.solve(
        devices=3,
        mem=2_000_000,
        batch=4,
        link=Link(bytes_per_s=1e9, latency_us=5.0),
        headroom=0.05,
        balance=[2, 2, 2],
        micro_batches=4,
    )
    assert texts == values
    grouped = [
        planner.solve(devices=3, mem="2MB", batch=4, together=group) for group in (["h.1,h.2"], [["h.1", "h.2"]])
    ]
    assert grouped[0] == grouped[1]


def test_files_are_written_only_where_requested(here: Path) -> None:
    """A plan refers to its profile by a relative path."""
    before = set(here.iterdir())
    planner.solve(devices=2, mem="2MB", batch=4)
    assert set(here.iterdir()) == before
    plan = planner.solve(devices=2, mem="2MB", batch=4, output=Path("plans/two.yaml"))
    assert files.read_plan("plans/two.yaml").balance == plan.balance
    assert plan.inputs.profile.path == "../profile.yaml"
    assert planner.check("plans/two.yaml").fits
    planner.sweep(devices="1,2", mem="1MB,2MB", batch=4, output="cells")
    assert {path.name for path in Path("cells").iterdir()} == {"1x2MB.yaml", "2x1MB.yaml", "2x2MB.yaml"}
    assert planner.check("cells/2x2MB.yaml", strict=True).fits


def test_plan_of_a_profile_value_needs_the_profile_for_a_check(here: Path) -> None:
    plan = planner.solve(gate.profile(), devices=2, mem="2MB", batch=4)
    with pytest.raises(UsageError, match="does not name a profile"):
        planner.check(plan)
    assert planner.check(plan, profile=gate.profile()).fits
    assert planner.check(plan, profile="profile.yaml").fits


def test_functions_raise_the_errors_of_the_commands(here: Path) -> None:
    with pytest.raises(InfeasibleError) as infeasible:
        planner.solve(devices=2, mem="1kB", batch=4)
    assert "2 devices need at least `--mem` " in infeasible.value.hint
    with pytest.raises(FileError):
        planner.check("nowhere.yaml")
    with pytest.raises(UsageError, match="both set the memory limit"):
        planner.check(mem="1GB", device="h100")
    with pytest.raises(UsageError, match="two or more"):
        planner.compare("plan.yaml")
    with pytest.raises(UsageError, match="number of devices is missing"):
        planner.solve(mem="1GB")


def test_emit_from_python_refuses_stale_plans_and_edited_scripts(here: Path) -> None:
    read = replace(files.read_profile("profile.yaml"), model=Model(source="model.py:build_model"))
    plan = planner.solve(read, devices=2, mem="2MB", batch=4)
    balance, script = planner.emit(plan, profile=read, output="out")
    assert (balance, script) == (Path("out/balance.yaml"), Path("out/train.py"))
    assert files.read_balance(str(balance)).balance == plan.balance
    script.write_text("mine")  # not one that was emitted
    with pytest.raises(FileError, match="was edited"):
        planner.emit(plan, profile=read, output="out")
    planner.emit(plan, profile=read, output="out", force=True)
    with pytest.raises(StaleError):
        planner.emit(plan, profile=replace(read, optimizer="sgd"), output="out")


@pytest.mark.slow
def test_profile_from_python_takes_a_module_or_a_file(here: Path) -> None:
    """A copy of the module is measured."""
    import torch
    from torch import nn

    quickly = {"repeat": 2, "time_budget": "0s"}
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    measured = planner.profile(
        model,
        example_batch=lambda size: (torch.randn(size, 8), torch.zeros(size, dtype=torch.long)),
        loss_fn=nn.functional.cross_entropy,
        batch_sizes=[1, 2],
        **quickly,
        output="given.yaml",
    )
    assert [layer.name for layer in measured.layers] == ["0", "1", "2"]
    assert measured.micro_batch_sizes == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert files.read_profile("given.yaml").layers[0].parameter_bytes == 4 * 72
    assert planner.solve("given.yaml", devices=2, mem="1MB").balance
    shaped = planner.profile(model, inputs=["8"], batch_sizes=1, **quickly, proof_budget="0s")
    assert shaped.layers[0].parameter_bytes == 4 * 72
    (page,) = blocks("docs/ci.md", "python")
    Path("model.py").write_text(page)
    from_file = planner.profile("model.py", batch_sizes=2, **quickly, proof_budget="0s")
    assert len(from_file.layers) == 5
    with pytest.raises(planner.core.errors.ModelError):
        planner.profile(model, **quickly)


@pytest.mark.slow
def test_example_of_the_python_guide_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("docs/python.md", "python")
    sizes = "batch_sizes=[1, 2, 4],"
    assert sizes in program
    quick = f'{sizes} repeat=2, time_budget="0s", proof_budget="0s",'
    exec(f"{program.replace(sizes, quick)}\nassert smallest is not None", {})
    printed = capsys.readouterr().out
    assert re.match(r"\(\d+(, \d+)*,?\) \d+ [\d.]+\n", printed)
    assert "GP204" in printed


# Notebooks


class _Checked(HTMLParser):
    """Parser that checks that every opened tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_plan_has_html_for_notebooks(here: Path) -> None:
    """Names are escaped, and there are no scripts."""
    plan = planner.solve(devices=3, mem="2MB", batch=4)
    odd = replace(plan, stages=(replace(plan.stages[0], first="<script>&", memory_bytes=1), *plan.stages[1:]))
    html = odd._repr_html_()
    page = _Checked()
    page.feed(html)
    assert page.open == []
    assert "<script" not in html
    assert any("<script>&" in text for text in page.text)
    assert len(html) < 10_000


def test_other_results_show_the_output_of_their_command(here: Path) -> None:
    plan = planner.load_plan("plan.yaml")
    results = (
        (planner.check("plan.yaml"), "fits"),
        (planner.compare(plan, plan), "plan 2"),
        (planner.sweep(devices=[1, 2], mem=["1MB", "2MB"], batch=4), "2 devices"),
        (files.read_profile("profile.yaml"), "layers"),
    )
    for value, word in results:
        html = value._repr_html_()
        page = _Checked()
        page.feed(html)
        assert page.open == []
        assert word in "".join(page.text)


def test_plans_and_profiles_have_a_short_repr(here: Path) -> None:
    for value in (planner.load_plan("plan.yaml"), files.read_profile("profile.yaml")):
        assert len(repr(value)) < 200
        assert repr(value).startswith(f"{type(value).__name__}(")
        assert "\n" not in repr(value)


# `--against git:…`


@pytest.fixture
def repository(here: Path) -> Path:
    """Return a git repository whose branch `main` has profile and plan in a folder."""
    (here / "plans").mkdir()
    for name in ("plan.yaml", "profile.yaml"):
        (here / name).rename(here / "plans" / name)
    for words in (
        ("init", "-q", "-b", "main"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"),
    ):
        subprocess.run(["git", *words], cwd=here, check=True)
    return here


def test_plan_is_compared_with_the_committed_one(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed plan uses the profile of its revision."""
    gate.write(repository / "plans", widened=1000, cap=2_000_000)
    for folder, path in ((repository, "plans/plan.yaml"), (repository / "plans", "plan.yaml")):
        monkeypatch.chdir(folder)
        difference = planner.check(path, against="git:main").difference
        assert difference.recomputed
        assert [stage.more_bytes for stage in difference.stages] == [0, 2000, 0]


def test_plan_without_its_profile_is_compared_as_written(repository: Path) -> None:
    Path("main-plan.yaml").write_text(Path("plans/plan.yaml").read_text())
    gate.write(repository / "plans", widened=1000, cap=2_000_000)
    difference = planner.check("plans/plan.yaml", against="main-plan.yaml").difference
    assert not difference.recomputed
    assert [stage.more_bytes for stage in difference.stages] == [0, 2000, 0]


@pytest.mark.parametrize("revision", ["nowhere", "--output=/tmp/x", "HEAD~5", ""])
def test_unknown_revisions_are_refused_with_a_hint(repository: Path, revision: str) -> None:
    """No revision is used as an option of git."""
    with pytest.raises(FileError, match=r"git says|revision is missing") as refused:
        planner.check("plans/plan.yaml", against=f"git:{revision}")
    assert "fetch-depth" in refused.value.hint or "git:main" in refused.value.hint


def test_git_revisions_need_a_file_in_a_repository(here: Path) -> None:
    with pytest.raises(UsageError, match="needs a plan in a file"):
        planner.check(files.read_plan("plan.yaml"), profile=gate.profile(), against="git:main")
    with pytest.raises(FileError, match="git says: not a git repository") as refused:
        planner.check("plan.yaml", against="git:main")
    assert refused.value.hint == "name a file instead: `--against other.yaml`"


def test_verdicts_can_be_written_as_json(here: Path) -> None:
    verdict = planner.check(against="plan.yaml")
    assert json.loads(files.dump(verdict, as_json=True))["difference"]["against"] == "plan.yaml"


def test_assumed_split_backwards_are_noted() -> None:
    said: list[str] = []
    profile = profile_of([1.0] * 4, [2.0] * 4, size=1)
    for schedule in ("zb-h1", "1f1b", "auto"):
        planner.solve(profile, devices=2, mem="1GB", batch=4, schedule=schedule, note=said.append)
    assert [text for text in said if "split backward" in text] == [said[0]]
    assert "profile on the device to measure them" in said[0]
