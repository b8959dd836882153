"""Edits of the local graph that change how it computes, not what."""
