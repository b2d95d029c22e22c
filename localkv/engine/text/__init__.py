"""From token ids to text as it grows, and what ends it."""
