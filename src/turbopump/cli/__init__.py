"""The ``turbopump`` command. Importing it costs next to nothing: commands import what they need."""


def main() -> None:
    """Run the command line; ends the process."""
    from turbopump.cli.app import app

    app(prog_name="turbopump")
