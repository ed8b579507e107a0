"""The report's figures: each is drawn from a tidy data frame.

Text and series have fixed colours here, which the page replaces by CSS variables, so that one SVG
is readable on light and on dark.
"""
