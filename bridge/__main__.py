"""Entry of `python -m bridge`."""

from bridge.cli import app

if __name__ == "__main__":
    app(prog_name="python -m bridge")
