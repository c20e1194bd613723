"""``turbopump spark``: what programs on Spark need beside Turbopump's own commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turbopump.cli.administration import reported

app = typer.Typer()
# Without it, a group of one command would be that command.
app.callback()(lambda: None)

_FOR_ARCHIVES = """Unpack it where the driver starts, and pass it on:
  mkdir -p turbopump && tar -xzf {file} -C turbopump
  export PYSPARK_PYTHON=./turbopump/bin/python
  spark-submit --archives {file}#turbopump ..."""

_FOR_PY_FILES = """It does not contain the compiled packages that Turbopump needs. Pass it on:
  export PYTHONPATH={file}
  spark-submit --py-files {file} ..."""


@app.command()
def package(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .tar.gz, or a .zip without dependencies.")
    ] = Path("turbopump-spark.tar.gz"),
) -> None:
    """Write an archive with everything that Spark executors need, for --archives."""
    from turbopump.spark.executor_package import write_package

    with reported():
        written = write_package(file)
        typer.echo(
            f"Wrote {file}, {written.size / 1024**2:.1f} MiB: {', '.join(written.distributions)}."
        )
        typer.echo((_FOR_ARCHIVES if written.is_complete else _FOR_PY_FILES).format(file=file))
