"""The rights that each role needs in Postgres and Kafka, as statements and commands for an administrator."""
