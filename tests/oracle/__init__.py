"""What two commits say and train, held against each other: `make oracle OLD=<commit>`."""
