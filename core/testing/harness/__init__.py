"""What only our own tests and `core.lab` use: servers, sites, whole pipelines. No part of the kit, and free to change."""
