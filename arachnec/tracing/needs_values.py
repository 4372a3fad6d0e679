"""Does an error say that a computation needs numbers where there are only shapes?"""

from __future__ import annotations

import re

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from arachnec.ir.diagnostic import UserError

OF_TORCH = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What else torch says of a fake or meta tensor: item(), numpy(), a format string, an operator without a meta form.
SAID = re.compile(
    r"\bmeta\b|\bregister_meta\b|\bFakeTensor\b|not supported for tensor subclasses|its data is not allocated yet"
    r"|unsupported format string passed to Tensor",
    re.IGNORECASE,
)


def needs_values(error: Exception) -> bool:
    """Whether torch raised it because a tensor is on the meta device or fake; else it is the caller's own mistake.

    Of a ``UserError`` what it reports is asked: a model file's functions report their exceptions so.
    """
    raised = error.__cause__ if isinstance(error, UserError) and error.__cause__ is not None else error
    if isinstance(raised, OF_TORCH):
        return True
    return isinstance(raised, (NotImplementedError, RuntimeError, TypeError)) and SAID.search(str(raised)) is not None
