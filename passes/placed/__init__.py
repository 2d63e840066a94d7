"""The placed graph, free of torch: which device each operator runs on, and the copies between devices."""
