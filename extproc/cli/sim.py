"""`inferact sim`: a simulated engine."""

from typing import TYPE_CHECKING, Annotated

import typer

from extproc.cli.shared import fail, one_line
from extproc.hardware import PROFILES, Hardware

if TYPE_CHECKING:
    from extproc.simulator.faults import Fault

_FAULT_HELP = (
    "Something that goes wrong: KIND, or KIND,FIELD=VALUE,... such as error-503,probability=0.1 or "
    "die,contains=poison,count=1. May be given several times."
)
_Hardware = Annotated[Hardware, typer.Option(help="The accelerator whose speed and memory it has.")]
_Models = Annotated[list[str] | None, typer.Option(help="A model it serves; the first gives the size.")]
_Blocks = Annotated[int | None, typer.Option(min=1, help="KV blocks of 16 tokens; else what fits.")]
_Length = Annotated[int, typer.Option(min=1, help="The longest prompt and output, in tokens.")]
_Interval = Annotated[
    float | None, typer.Option(min=0, help="Simulated seconds of every step, whatever the hardware.")
]
_KvEvents = Annotated[
    str | None, typer.Option(help="Where to publish KV events, such as tcp://127.0.0.1:5557.")
]
_KvReplay = Annotated[
    str | None, typer.Option(help="Where to repeat those missed, such as tcp://127.0.0.1:5558.")
]
_Record = Annotated[bool, typer.Option("--record", help="Keep the last requests, for tests to read.")]


def sim(
    host: Annotated[str, typer.Option(help="The IP address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    name: Annotated[str, typer.Option(help="Its name, in a header of every answer.")] = "sim",
    model: _Models = None,
    hardware: _Hardware = Hardware.A100_80G,
    gpu_count: Annotated[int, typer.Option(min=1, max=64, help="How many of them work as one.")] = 1,
    num_blocks: _Blocks = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The largest batch; more requests wait.")] = 256,
    max_model_len: _Length = 131_072,
    speed: Annotated[float, typer.Option(help="Simulated seconds in a real one; inf answers at once.")] = 1.0,
    token_interval_s: _Interval = None,
    kv_events: _KvEvents = None,
    kv_replay: _KvReplay = None,
    kv_topic: Annotated[str, typer.Option(help="The topic of KV events.")] = "",
    record: _Record = False,
    seed: Annotated[int, typer.Option(help="Seed of its chance.")] = 0,
    fault: Annotated[list[str] | None, typer.Option(metavar="FAULT", help=_FAULT_HELP)] = None,
) -> None:
    """Run a simulated engine, until Ctrl-C: vLLM's API, metrics, timing and failures, without a GPU."""
    if hardware is Hardware.CUSTOM:
        raise typer.BadParameter(
            "`custom` says nothing of its speed; name the nearest accelerator and --speed"
        )
    faults = tuple(_fault(text) for text in fault or ())
    from extproc.simulator.engine import run
    from extproc.simulator.options import SimulatorOptions

    try:
        options = SimulatorOptions(
            name=name,
            models=tuple(model or ("simulated-8b",)),
            hardware=PROFILES[hardware].scaled(gpu_count),
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            speed=speed,
            token_interval_s=token_interval_s,
            kv_events=kv_events,
            kv_replay=kv_replay,
            kv_topic=kv_topic,
            record=record,
            seed=seed,
            faults=faults,
        )
    except ValueError as error:
        fail(str(error))
    models = ", ".join(options.models)
    with one_line():
        run(options, host, port, lambda url: typer.echo(f"{name} serves {models} at {url} (Ctrl-C stops it)"))


def _fault(text: str) -> "Fault":
    """Read `KIND,FIELD=VALUE,...`."""
    import msgspec

    from extproc.simulator.faults import Fault, FaultKind

    kind, *fields = text.split(",")
    values = {"kind": kind}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{field}` is no FIELD=VALUE", param_hint="--fault")
        values[key] = value
    try:
        return msgspec.convert(values, Fault, strict=False)
    except msgspec.ValidationError as error:
        kinds = ", ".join(FaultKind)
        raise typer.BadParameter(f"`{text}`: {error}; KIND is one of {kinds}", param_hint="--fault") from None
