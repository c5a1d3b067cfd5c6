"""A root-mean-square norm in NumPy. See plugin.py for what is registered."""
