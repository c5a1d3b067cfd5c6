"""See plugin.py for what this distribution registers."""
