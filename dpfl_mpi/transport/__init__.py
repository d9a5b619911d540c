"""How models move between clients, and what that would cost on a network (docs/experiments.md)."""
