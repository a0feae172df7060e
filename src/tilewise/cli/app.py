"""All commands; a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ..bench.run import WrongResult
from ..core.errors import NoAlgorithm, NotInstalled, TilewiseError
from . import MISSING, NO, OK, USAGE
from .bench import app as bench
from .bundle import bundle
from .doctor import doctor
from .explain import explain
from .gpu_audit import gpu_audit
from .image import image
from .infer import infer
from .ladder import ladder
from .output import errors
from .profile import profile
from .report import report
from .selftest import selftest
from .train import train
from .tune import tune
from .wisdom import app as wisdom

COMMANDS: dict[str, Callable[..., None]] = {
    "bundle": bundle,
    "doctor": doctor,
    "explain": explain,
    "gpu-audit": gpu_audit,
    "image": image,
    "infer": infer,
    "ladder": ladder,
    "profile": profile,
    "report": report,
    "selftest": selftest,
    "train": train,
    "tune": tune,
}
GROUPS = {
    "bench": bench,
    "wisdom": wisdom,
}

# others are wrong usage
CODES = {NotInstalled: MISSING, WrongResult: NO, NoAlgorithm: NO}

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown",
                  pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def _version(wanted: bool) -> None:
    if wanted:
        import tilewise

        print(f"tilewise {tilewise.__version__}")
        raise typer.Exit()


@app.callback()
def tilewise_(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True,
                                           help="Print the version.")) -> None:
    """Tilewise plans, tunes and compiles convolutions of PyTorch for the machine at hand.

    A SUBJECT is a model (vgg16, resnet50, ...), a problem such as
    n8c64h56w56k64r3s3p1_f32_forward+bias+relu, or package.module:factory, a function without
    arguments that returns a torch.nn.Module, or the module and an example of its input.

    Exit codes: 0 all is well, 1 the answer is no (a regression, a wrong result, stale wisdom),
    2 the command was not understood, 3 something is not installed.
    """


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    try:
        code = app(arguments, prog_name="tilewise", standalone_mode=True)
    except SystemExit as end:
        code = end.code
    except TilewiseError as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        return next((code for kind, code in CODES.items() if isinstance(error, kind)), USAGE)
    except OSError as error:  # a full disk, a directory that cannot be written
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        return NO
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else OK
