"""One file a question that results answer: what is found, and the table that shows it."""
