"""The modes that an idiom runs in, each a set of variables and a way in, and which modes fit which idiom."""

from __future__ import annotations

from dataclasses import dataclass, field

UNTOUCHED = "untouched"
# Of every mode: the first steps count, and a record of some steps needs no room for hours.
COMMON = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_TRACE_EVENTS": "16384"}


@dataclass(frozen=True)
class Mode:
    """How the package comes into a script.

    variables: set from the start. imported: the script imports the package. later: variables that are set after the
    import, so that the import enables nothing. bound: with more than two ranks sums are in another order. kinds: of
    idioms that the mode fits.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    imported: bool = True
    later: dict[str, str] = field(default_factory=dict)
    bound: bool = False
    kinds: tuple[str, ...] = ("ddp", "horovod")

    @property
    def measures(self) -> bool:
        """True where the package must measure the training, unless the model was left alone."""
        return self.name not in (UNTOUCHED, "import")

    @property
    def moves(self) -> bool:
        """True where bytes must have been sent by a transport of ours, unless the model was left alone."""
        return self.bound and self.name not in ("shm", "import")

    @property
    def turns(self) -> bool:
        """True where stock has the first steps, and other transports later ones."""
        transports = (self.variables | self.later).get("NETBOTTLENECK_TRANSPORT", "")
        return transports.startswith(("stock,", "auto"))


def _transport(names: str, **others: str) -> dict[str, str]:
    return {
        **COMMON,
        "NETBOTTLENECK_TRANSPORT": names,
        **{f"NETBOTTLENECK_{key}": value for key, value in others.items()},
    }


MODES = {
    mode.name: mode
    for mode in (
        Mode(UNTOUCHED, imported=False, kinds=("ddp", "horovod", "loop", "sharded")),
        Mode("observe", {**COMMON, "NETBOTTLENECK": "1"}, kinds=("ddp", "horovod", "sharded")),
        Mode("stock", _transport("stock"), kinds=("ddp", "horovod", "sharded")),
        Mode("tcp", _transport("tcp"), bound=True),
        Mode("ofi", _transport("ofi"), bound=True),
        Mode("shm", _transport("tcp", SHM="auto"), bound=True),
        Mode("blocks1", _transport("stock,tcp", BLOCK_STEPS="1"), bound=True),
        Mode("blocks2", _transport("stock,tcp", BLOCK_STEPS="2"), bound=True),
        Mode("auto", _transport("auto", BLOCK_STEPS="1"), bound=True),
        Mode("attach", later=_transport("tcp"), bound=True, kinds=("ddp",)),
        Mode("profile", later=_transport("tcp"), bound=True, kinds=("loop",)),
        Mode("profile_blocks", later=_transport("stock,tcp", BLOCK_STEPS="1"), bound=True, kinds=("loop",)),
        Mode("import", bound=True, kinds=("horovod",)),  # netbottleneck.torch by its own name, nothing measured
    )
}
