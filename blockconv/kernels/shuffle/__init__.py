"""Channel shuffles."""
