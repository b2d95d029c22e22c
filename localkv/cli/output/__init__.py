"""What commands write: results, messages, tables, progress and pictures."""
