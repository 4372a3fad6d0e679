"""Does an error say that a computation needs numbers where there are only shapes?"""

from __future__ import annotations

import re

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

OF_TORCH = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What else torch says of a fake or meta tensor: item(), numpy(), a format string, an operator without a meta form.
SAID = re.compile(
    r"\bmeta\b|\bFakeTensor\b|not supported for tensor subclasses|its data is not allocated yet"
    r"|unsupported format string passed to Tensor",
    re.IGNORECASE,
)


def needs_values(error: Exception) -> bool:
    """Whether torch raised it because a tensor is on the meta device or fake; else it is the caller's own mistake."""
    if isinstance(error, OF_TORCH):
        return True
    return isinstance(error, (NotImplementedError, RuntimeError, TypeError)) and SAID.search(str(error)) is not None
