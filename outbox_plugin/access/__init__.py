"""What each role may do in Postgres and in Kafka: least privilege as statements and commands for an administrator."""
