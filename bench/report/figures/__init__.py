"""The report's figures: each a tidy frame first, then drawn from it.

Ink and series have colours of their own here, which the page replaces by CSS variables, so that one
SVG reads on light and on dark.
"""
