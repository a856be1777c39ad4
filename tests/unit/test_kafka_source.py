"""librdkafka's properties as Spark's Kafka source takes them."""

from __future__ import annotations

import pytest

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.spark.kafka_source import java_properties


def test_tls_and_sasl_have_their_counterparts() -> None:
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "app",
        "sasl.password": 'a"b\\c',
        "ssl.ca.location": "/etc/ca.pem",
        "linger.ms": "5",
    }
    login = "org.apache.kafka.common.security.scram.ScramLoginModule"
    assert java_properties(given) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": login + r' required username="app" password="a\"b\\c";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/etc/ca.pem",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sasl.username": "app", "sasl.mechanism": "GSSAPI"}, "sasl.mechanism is 'GSSAPI'; Spark logs in by PLAIN"),
        ({"sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc"}, "cannot log in by .*OAUTHBEARER"),
        ({"ssl.key.location": "/key.pem"}, "'ssl.key.location' cannot be passed on"),
    ],
)
def test_what_has_none_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        java_properties(given)
