"""What a process keeps and knows: limits, wisdom, plans that travel; the GPU audit."""
