"""`gemsc predict`: a trained model over a slide or a volume, window by window."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gemsc.cli.export import program_of, trained_model
from gemsc.cli.terminal import tell
from gemsc.errors import GemscError, say_note, warn
from gemsc.launch.launch import bar_settings, launch
from gemsc.plan import Plan
from gemsc.runtime.process.device import require_gpu
from gemsc.runtime.training.predict import DTYPES, INPUT_HELP, KINDS, Job
from gemsc.runtime.training.program_directory import (
    check_program,
    load_program,
    tell_of_settings,
)
from gemsc.slides.slide import Slide, tifffile_module
from gemsc.slides.volume import SUFFIXES, Volume, is_volume
from gemsc.slides.windows import Picture
from gemsc.user_model import load_user_model
from gemsc.weights.write import write_stream

DEVICES = ("auto", "cpu", "cuda")
TIFF_SUFFIXES = (".tiff", ".tif")
USUAL_OVERLAP = 64  # pixels, or an eighth of the window if that is less


def predict_command(
    run: Annotated[
        Path,
        typer.Argument(help="run folder, one of its checkpoints, or a program"),
    ],
    pictures: Annotated[
        list[Path],
        typer.Argument(
            help="slides (.tiff, .svs, .png), volumes (.nii.gz, DICOM) or OME-Zarr",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="file to write, or the folder for several pictures (default: "
            "mask.tiff, mask.nii.gz for a volume, masks/ for several)",
        ),
    ] = None,
    level: Annotated[int, typer.Option(help="pyramid level; 0 is the finest")] = 0,
    overlap: Annotated[
        int | None,
        typer.Option(
            help="overlap of neighbouring windows on each side in pixels (default: 64, "
            "or an eighth of the window; for volumes: eval_windows)",
            min=0,
        ),
    ] = None,
    orientation: Annotated[
        str | None,
        typer.Option(
            help="orientation of a volume for the model: RAS, LPS, ... (default: as in "
            "the file)"
        ),
    ] = None,
    spacing: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            help="voxel size for the model, in the unit of the file: 1.5 1.5 2; the "
            "output keeps that of the file"
        ),
    ] = None,
    output_kind: Annotated[
        str, typer.Option(help="mask, probabilities or scores (what the model returns)")
    ] = "mask",
    threshold: Annotated[
        float,
        typer.Option(help="score above which a pixel of a one-channel mask is 1"),
    ] = 0.0,
    ema: Annotated[
        bool, typer.Option(help="predict with the averaged weights of --ema")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="overwrite the output file")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or float64")] = "float32",
) -> None:
    """Predict whole slides or volumes, window by window, on a program's ranks."""
    for name, value, choices in (
        ("--output-kind", output_kind, KINDS),
        ("--device", device, DEVICES),
        ("--dtype", dtype, DTYPES),
    ):
        if value not in choices:
            raise GemscError(f"{name}: unknown '{value}'", help=", ".join(choices))
    if device == "cuda":
        require_gpu()
    if not run.is_dir():
        raise GemscError(
            f"{run} is a file" if run.exists() else f"there is no folder {run}",
            help="give the folder of a run, or a program, and then the picture",
        )
    program = program_of(run)
    outputs = _outputs(output, pictures)
    plan = check_program(program, Plan.read(program / "plan.toml").ranks)
    tell_of_settings(program, plan)
    taken = _taken(program, plan)
    makes_input = _makes_input(plan)
    for picture in pictures:
        channels = _channels(plan, picture, level, orientation, spacing, taken)
        if not makes_input and channels != taken.channels:
            raise GemscError(
                f"{picture} has {channels} channels, but the model expects "
                f"{taken.channels}",
                help=INPUT_HELP,
            )
    _check_outputs(outputs, pictures, overwrite=overwrite)
    _tell_of_input(plan, taken, makes_input)
    if overlap is None and not is_volume(pictures[0]):
        overlap = min(USUAL_OVERLAP, min(taken.size) // 8)
    if overlap is not None and 2 * overlap >= min(taken.size):
        raise GemscError(
            f"windows of {taken} cannot overlap by {overlap} on each side: nothing is "
            "left of them",
            help="give a smaller --overlap, or compile with larger example_inputs()",
        )
    (folder := outputs[0].parent).mkdir(exist_ok=True)
    with (
        trained_model(run, averages=ema) as trained,
        tempfile.TemporaryDirectory(
            dir=folder, prefix=f".{outputs[0].name}.", ignore_cleanup_errors=True
        ) as name,
    ):
        work = Path(name)
        write_stream(work / "weights.safetensors", trained.table, trained.read)
        job = Job(
            program=str(program),
            weights=str(work / "weights.safetensors"),
            pictures=[*zip(map(str, pictures), map(str, outputs), strict=True)],
            level=level,
            orientation=orientation,
            spacing=spacing,
            overlap=overlap,
            kind=output_kind,
            threshold=threshold,
            device=device,
            dtype=dtype,
            constants=trained.constants,
        )
        job.write(work / "job.json")
        module = "gemsc.runtime.training.predict"
        words = [sys.executable, "-m", module, str(work / "job.json")]
        if (code := launch(plan.ranks, words, env=bar_settings())) != 0:
            raise typer.Exit(code)
    several = len(outputs) > 1
    written = f"{len(outputs)} files in {folder}" if several else outputs[0]
    tell(f"wrote {written}: {trained.what}")


def _outputs(given: Path | None, pictures: Sequence[Path]) -> list[Path]:
    """Return the file to write for each picture: in a folder, by the picture's name.

    Raises:
        GemscError: a picture is missing, or there is one file for several.
    """
    for picture in pictures:
        if not picture.exists():
            advice = "give a slide or a volume"
            raise GemscError(f"there is no file {picture}", help=advice)
    if len(pictures) == 1 and not (given and given.is_dir()):
        return [given or Path("mask.nii.gz" if is_volume(pictures[0]) else "mask.tiff")]
    folder, outputs = given or Path("masks"), dict[Path, Path]()
    if folder.is_file() or folder.name.lower().endswith((*SUFFIXES, *TIFF_SUFFIXES)):
        raise GemscError(
            f"{folder} is one file, but there are {len(pictures)} pictures",
            help="name a folder with -o, or predict them one by one",
        )
    for picture in pictures:
        name = picture.resolve().name
        if picture.is_file():
            name = Path(name.removesuffix(".gz")).stem
        output = folder / f"{name}{'.nii.gz' if is_volume(picture) else '.tiff'}"
        if (other := outputs.setdefault(output, picture)) is not picture:
            raise GemscError(
                f"{other} and {picture} would both be written to {output}",
                help="predict them one by one, into different folders",
            )
    return [*outputs]


def _check_outputs(
    outputs: Sequence[Path], pictures: Sequence[Path], *, overwrite: bool
) -> None:
    for output, picture in zip(outputs, pictures, strict=True):
        _check_output(output, picture, overwrite=overwrite)
    folder = needed = outputs[0].parent
    if len(outputs) > 1 and not folder.exists():  # that is made
        needed = folder.parent
    if not needed.is_dir():
        raise GemscError(
            f"{outputs[0]} cannot be written: there is no folder {needed}",
            help=f"make it (mkdir -p {folder}), or name another one with -o",
        )


def _check_output(output: Path, picture: Path, *, overwrite: bool) -> None:
    is_deep = is_volume(picture)
    suffixes = SUFFIXES if is_deep else TIFF_SUFFIXES
    if not output.name.lower().endswith(suffixes):
        what = "a volume" if is_deep else "a picture"
        raise GemscError(
            f"{output} cannot hold the prediction of {what}",
            help=f"name a file that ends in {' or '.join(suffixes)}",
        )
    if output.is_dir():
        raise GemscError(f"{output} is a folder", help="name a file with -o")
    if output.exists() and output.samefile(picture):
        raise GemscError(
            f"{output} would replace the picture that is read",
            help="name another file or folder with -o",
        )
    if output.exists() and not overwrite:
        raise GemscError(
            f"{output} exists already",
            help="name another file with -o, or replace it with --overwrite",
        )


def _taken(program: Path, plan: Plan) -> Picture:
    """Return what the model takes of each window.

    Raises:
        GemscError: none of its inputs is a picture.
    """
    for rank in range(plan.copy_ranks):
        inputs = load_program(program, rank).inputs.values()
        shapes = (item.shape for item in inputs if item.path[0] == "input")
        picture = next(filter(None, map(Picture.of_shape, shapes)), None)
        if picture is not None:
            return picture
    raise GemscError(
        f"{plan.model} takes no picture: samples x channels x height x width, or x, y, "
        "z of a volume",
        help="give a program whose example_inputs() are pictures or volumes",
    )


def _makes_input(plan: Plan) -> bool:
    """Return whether the model's file says what the model gets of a picture."""
    if not plan.spec:
        return False
    user = load_user_model(plan.spec, constants=plan.constants)
    user.make_windows()  # what is wrong with them is said now
    return user.predict_input is not None


def _tell_of_input(plan: Plan, taken: Picture, makes_input: bool) -> None:
    if plan.mixes_samples:
        warn(
            "forward mixes samples: what it gives for a window depends on the others "
            "in its micro-batch",
            help="compile with an example_inputs() of one sample to predict each alone",
        )
    if plan.spec and not makes_input:
        what = "voxels as in the file" if len(taken.size) == 3 else "pixels from 0 to 1"
        say_note(f"the model gets {what}; if dataset() gives others, {INPUT_HELP}")


def _channels(
    plan: Plan,
    path: Path,
    level: int,
    orientation: str | None,
    spacing: tuple[float, float, float] | None,
    taken: Picture,
) -> int:
    """Return a picture's channels; refuse what the model cannot take."""
    is_deep = len(taken.size) == 3
    if is_deep != is_volume(path):
        one, other = ("volumes", "picture") if is_deep else ("pictures", "volume")
        formats = ".nii.gz, DICOM" if is_deep else "a file, TIFF, .svs or .png,"
        raise GemscError(
            f"{plan.model} expects {one} (windows of {taken}), but {path} is a {other}",
            help=f"give {formats} or OME-Zarr",
        )
    for name, value in (("--orientation", orientation), ("--spacing", spacing)):
        if not is_deep and value is not None:
            raise GemscError(
                f"{name} is only for volumes, but {path} is a picture",
                help="leave it out",
            )
    if is_deep:
        return Volume(path, orientation, level, spacing).channels
    tifffile_module()
    return Slide(path, level).shape[2]
