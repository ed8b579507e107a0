"""One folder with every report, readable offline."""
