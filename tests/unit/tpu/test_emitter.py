"""Errors of the emitter of one JAX program, on hand-written profiles."""

from dataclasses import replace

import pytest

from planner.core.errors import UsageError
from planner.tpu.emitter import emit
from tests.unit.emit.test_engines import plan_of, tied


def test_shared_parameters_across_stages_are_refused_with_remedies() -> None:
    """`--together` is named only if it leaves more than one stage."""
    profile = tied()
    *others, last = profile.layers
    nearer = replace(profile, layers=(*others, replace(last, tied=(f"{others[1].name}.weight",))))
    for shared, may_be_together in ((profile, False), (nearer, True)):
        with pytest.raises(UsageError, match="share parameters across stages") as refused:
            emit(plan_of(shared, (3, 3)), shared, folder=".", profile_folder=".")
        assert "`tie_word_embeddings=False`" in refused.value.hint
        assert "the bundled executor sums them" in refused.value.hint
        assert ("--together" in refused.value.hint) == may_be_together
