"""What goes wrong in an emulated kernel, said so that the line at fault is found at once."""

from __future__ import annotations

from cupyq.errors import EmulatorError


class UnsupportedPTX(EmulatorError):
    """The PTX holds something that the emulator does not know; it is refused before anything runs."""

    def __init__(self, what: str, line: int = 0, text: str = "") -> None:
        self.line, self.text = line, text.strip()
        where = f" (PTX line {line}: {self.text})" if line else ""
        super().__init__(what + where)


class EmulatorFault(EmulatorError):
    """The kernel did something that is an error, or undefined, on a GPU.

    Attributes
    ----------
    kind : str
        ``"memory"``, ``"init"``, ``"race"``, ``"sync"``, ``"deadlock"``, ``"trap"`` or ``"limit"``.
    message : str
        What happened, in words.
    thread, block : tuple of int or None
        ``threadIdx`` and ``blockIdx`` of the first thread at fault.
    line : int
        Line of the PTX text, counted from 1.
    text : str
        That line.
    source : str
        ``file:line`` of the CUDA source where the PTX has ``.loc`` (``-lineinfo``), else empty.
    address : int or None
        The address at fault, as the kernel saw it.
    argument : int or None
        Index of the launch argument that the address lies nearest to.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        thread: tuple[int, int, int] | None = None,
        block: tuple[int, int, int] | None = None,
        line: int = 0,
        text: str = "",
        source: str = "",
        address: int | None = None,
        argument: int | None = None,
    ) -> None:
        self.kind, self.message, self.thread, self.block = kind, message, thread, block
        self.line, self.text, self.source = line, text.strip(), source
        self.address, self.argument = address, argument
        said = f"{kind}: {message}"
        if thread is not None:
            said += f"; thread {thread} of block {block}"
        if line:
            said += f"; PTX line {line}: {self.text}"
        if source:
            said += f" [{source}]"
        super().__init__(said)
