"""A sweep: its options, checks, plan, display and execution."""
