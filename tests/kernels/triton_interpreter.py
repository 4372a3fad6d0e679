"""Lets Triton 3.6's interpreter (PyTorch 2.11) run under NumPy 2.5, where an array of one element is no int."""

from typing import Any

from triton.runtime import interpreter


def let_one_element_be_an_index() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
