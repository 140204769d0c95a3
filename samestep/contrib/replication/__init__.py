"""Launches that are replicas of one run: any of them may die, hang, leave or join (--fault_tolerance step)."""
