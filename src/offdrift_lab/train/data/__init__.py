"""Problems, environments and rewards; where rollouts come from and how they are selected."""
