// SPDX-License-Identifier: Apache-2.0
// Sortable tables. Columns that no row has a value for are left out.
'use strict';

(() => {
  const number = (key, title) => ({key, title, get: (row) => row[key], format: (v) => Report.number(v)});
  const text = (key, title) => ({key, title, get: (row) => row[key], format: String, text: true});

  Report.COLUMNS = [
    {key: 'source', title: 'source', get: (row) => Report.source(row), format: String, text: true},
    text('impl', 'impl'),
    text('dtype', 'dtype'),
    text('precision', 'precision'),
    text('mode', 'mode'),
    number('batch', 'B'),
    {key: 'causal', title: 'causal', get: (row) => row.causal, format: (v) => (v ? 'yes' : 'no'), text: true},
    number('lq', 'Lq'),
    number('lkv', 'Lkv'),
    number('hq', 'Hq'),
    number('hkv', 'Hkv'),
    number('head_dim', 'D'),
    number('model_dim', 'model dim'),
    {key: 'num_splits', title: 'splits', get: (row) => row.num_splits, format: String},
    number('block_k', 'block_k'),
    number('median_ms', 'median ms'),
    number('q1_ms', 'q1 ms'),
    number('q3_ms', 'q3 ms'),
    {...number('versus', 'over best'), format: Report.ratio},
    number('tflops', 'TFLOP/s'),
    number('peak_percent', '% of peak'),
    number('gb_s', 'GB/s'),
    number('read_percent', '% of read'),
    number('intensity', 'FLOP/byte'),
    number('rel_err', 'rel. error'),
    number('rel_vs', 'rel. to baseline'),
    text('baseline', 'baseline'),
    number('compile_s', 'compile s'),
    number('xla_temp_mb', 'temp MiB'),
    number('residual_mb', 'residual MiB'),
    number('peak_mb', 'peak MiB'),
    number('inputs_mb', 'inputs MiB'),
    number('kv_mb', 'K+V MiB'),
    number('longest_seq', 'longest'),
    text('limit', 'limit'),
    number('inner', 'calls/sample'),
    number('rounds', 'rounds'),
    text('run', 'run'),
    {...text('note', 'note'), long: true},
  ];

  const has = (value) => value !== undefined && value !== null && value !== '';

  // A table of `rows`; rows keep their ids, so that a chart's mark can be found in it.
  Report.table = (rows, columns) => {
    const shown = columns.filter((column) => rows.some((row) => has(column.get(row))));
    const body = Report.element('tbody');
    const fill = (ordered) => {
      body.replaceChildren(...ordered.map((row) => Report.element(
        'tr', {'data-id': row.id},
        ...shown.map((column) => {
          const value = column.get(row);
          const kind = column.long ? 'text long' : column.text ? 'text' : '';
          const extra = column.tone ? column.tone(row) : '';
          return Report.element('td', {
            class: `${kind} ${extra}`.trim(), 'data-key': column.key, text: has(value) ? column.format(value) : '',
          });
        }),
      )));
    };
    let sorted = null;
    let ascending = true;
    const heads = shown.map((column) => {
      const sort = () => {
        ascending = sorted === column ? !ascending : true;
        sorted = column;
        heads.forEach((head) => head.removeAttribute('aria-sort'));
        heads[shown.indexOf(column)].setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
        // Rows without a value stay at the end, whatever the direction.
        const withValue = rows.filter((row) => has(column.get(row)));
        const without = rows.filter((row) => !has(column.get(row)));
        withValue.sort((a, b) => Report.byValue(column.get(a), column.get(b)) * (ascending ? 1 : -1));
        fill([...withValue, ...without]);
      };
      return Report.element('th', {
        scope: 'col', tabindex: '0', class: column.text ? 'text' : '', text: column.title, onclick: sort,
        onkeydown: (event) => {
          if (event.key === 'Enter' || event.key === ' ') {
            event.preventDefault();
            sort();
          }
        },
      });
    });
    fill(rows);
    const table = Report.element('table', {}, Report.element('thead', {}, Report.element('tr', {}, ...heads)), body);
    return Report.element('div', {class: 'table-box', tabindex: '0'}, table);
  };

  Report.tableDetails = (rows, columns, open = false) => {
    const details = Report.element('details', {}, Report.element('summary', {text: `Table: ${rows.length} rows`}));
    if (open) details.setAttribute('open', '');
    details.append(Report.table(rows, columns));
    return details;
  };
})();
