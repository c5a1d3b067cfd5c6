"""Projections with int8 weights. See plugin.py for what is registered."""
