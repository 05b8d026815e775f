"""For PyInstaller, which asks installed packages for the folders of their hooks (its entry point `pyinstaller40`)."""


def hook_dirs() -> list[str]:
    """This folder."""
    return [*__path__]
