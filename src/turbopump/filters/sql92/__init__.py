"""SQL92 expressions over message properties: ``amount > 100 AND region IN ('eu', 'us')``.

``tokens`` splits the text, ``parser`` builds the typed ``tree`` and checks it, ``evaluation`` turns
the tree into a function of a message's properties, with the ``conversions`` that comparisons need.
Type rules, three-valued logic and oddities are those of Apache RocketMQ 4.9.
"""

from turbopump.filters.sql92.conversions import ConversionFailed
from turbopump.filters.sql92.evaluation import Sql, SqlFilter, compile_sql

__all__ = ["ConversionFailed", "Sql", "SqlFilter", "compile_sql"]
