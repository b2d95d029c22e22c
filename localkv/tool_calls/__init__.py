"""Calls of tools in what a model writes: found as the text comes, and asked for by a grammar.

Models write calls each in the syntax of their family, which the chat template shows. Nothing here
knows HTTP, or runs a model. Whoever answers a request does this::

    tools = Tools(described, tool_choice, parallel=parallel_tool_calls)
    family = family_of(template)  # of the model; rendered once, then remembered
    prompt = model.chat_prompt(messages, tools=None if tools.choice == "none" else described)
    grammar = call_grammar(family, tools, model.tokenizer)  # a `Grammar`, or None
    stream = model.stream(prompt, grammar=grammar)
    reader = CallReader(family, tools)
    for piece in pieces_without_reasoning(stream):
        events = reader.push(piece)  # `Content`, `CallBegun`, `CallArguments`, `CallEnded`
    events = reader.end()
    is_called = reader.n_calls > 0

A `Grammar` is two texts and two flags, and may be sent to another process.
"""
