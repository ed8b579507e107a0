"""What airspeed velocity tracks over commits.

`asv run` imports this folder from the working tree and asks the harness of each commit, through
its command line and its records, so that figures of different commits answer the same questions.
"""
