"""Built-in tasks: data, environments and rubrics."""
