"""Tables and sentences, free of what they are about, and how each format writes them."""
