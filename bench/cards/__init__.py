"""All cards beside each other: what people measured, grouped by what may be compared."""
