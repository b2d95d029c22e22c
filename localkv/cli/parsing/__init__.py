"""From the words of a command line to values: options' types, help, defaults, advice, texts."""
