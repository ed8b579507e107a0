"""The questions and the answers of a sweep as data: axes, cases, records, and what they may
hold."""
