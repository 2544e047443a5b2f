"""Entry of `python -m bridge`."""

from bridge.cli.app import app

if __name__ == "__main__":
    app(prog_name="python -m bridge")
