"""A fleet of servers in simulated time: arrivals, replicas, rules of autoscaling."""
