"""Reports on records: tables, figures, one page. Nothing is measured here."""
