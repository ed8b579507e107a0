"""Generic tables and sentences, and the output formats that write them."""
