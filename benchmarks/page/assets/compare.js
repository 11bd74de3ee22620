// SPDX-License-Identifier: Apache-2.0
// Before and after: two sources (a file, or one tag of a file) as ratios of matched rows.
'use strict';

(() => {
  const FIELDS = ['suite', 'impl', 'dtype', 'precision', 'mode', 'batch', 'lq', 'lkv', 'hq', 'hkv', 'head_dim', 'causal',
    'num_splits', 'block_k', 'model_dim'];
  const key = (row) => FIELDS.map((name) => String(row[name])).join('|');

  const pairs = (rows, before, after) => {
    const known = new Map();
    for (const row of rows) if (Report.source(row) === before) known.set(key(row), row);
    return rows.filter((row) => Report.source(row) === after && known.has(key(row))).map((row) => {
      const old = known.get(key(row));
      return {
        ...row, before_ms: old.median_ms, ratio: row.median_ms / old.median_ms, low: row.q1_ms / old.q3_ms,
        high: row.q3_ms / old.q1_ms,
      };
    });
  };

  const COLUMNS = () => {
    const chosen = Report.COLUMNS.filter((column) => [...FIELDS, 'source'].includes(column.key));
    const value = (name, title, format) => ({key: name, title, get: (row) => row[name], format});
    const tone = (row) => (row.high < 1 ? 'better' : row.low > 1 ? 'worse' : '');
    return [
      {key: 'suite', title: 'suite', get: (row) => row.suite, format: String, text: true},
      ...chosen.filter((column) => column.key !== 'source'), value('before_ms', 'before ms', Report.number),
      value('median_ms', 'after ms', Report.number), {...value('ratio', 'after / before', Report.ratio), tone},
      value('low', 'low', Report.ratio), value('high', 'high', Report.ratio),
    ];
  };

  const mean = (values) => Math.exp(values.reduce((sum, v) => sum + Math.log(v), 0) / values.length);

  const chart = (matched, width) => {
    const sorted = [...matched].sort((a, b) => a.ratio - b.ratio);
    const series = Report.unique(sorted.map((row) => row.impl)).sort(Report.bySeries).map((impl) => ({
      ...Report.look(impl),
      points: sorted.map((row, index) => ({row, x: index + 1})).filter((p) => p.row.impl === impl).map(({row, x}) => ({
        x, y: row.ratio, low: row.low, high: row.high, row,
        lines: [`${row.impl}: ${Report.ratio(row.ratio)}`, Report.describe(row),
          `${Report.number(row.before_ms)} to ${Report.number(row.median_ms)} ms`,
          `interval ${Report.ratio(row.low)} to ${Report.ratio(row.high)}`],
      })),
    }));
    return Report.pointChart(series, {
      width, height: 300, label: 'after / before', xLabel: 'configurations, sorted by ratio', yLabel: 'after / before', xKind: 'linear',
      yKind: 'log', xTicks: [], rule: {y: 1, text: 'no change', start: true}, radius: 3.5,
    });
  };

  const select = (label, values, current, pick) => Report.element('label', {class: 'control'},
    Report.element('span', {text: label}),
    Report.element('select', {onchange: (event) => pick(event.target.value)},
      ...values.map((value) => {
        const option = Report.element('option', {value, text: value});
        if (value === current) option.setAttribute('selected', '');
        return option;
      })));

  // The first two sources that share a configuration, tags of one file first; null if none do.
  const firstPair = (rows, sources) => {
    const sameFile = (a, b) => a.split(' · ')[0] === b.split(' · ')[0];
    const candidates = sources.flatMap((a, i) => sources.slice(i + 1).map((b) => [a, b]));
    candidates.sort(([a, b], [c, d]) => Number(sameFile(c, d)) - Number(sameFile(a, b)));
    return candidates.find(([a, b]) => pairs(rows, a, b).length) || null;
  };

  Report.beforeAfter = (rows) => {
    const timed = rows.filter((row) => row.median_ms !== undefined && row.suite !== 'max_seq');
    const sources = Report.unique(timed.map(Report.source));
    const state = firstPair(timed, sources);
    if (!state) return null;
    const controls = Report.element('div', {class: 'controls'});
    const summary = Report.element('p', {class: 'blurb'});
    const legend = Report.element('div', {class: 'legend'});
    const charts = Report.element('div', {class: 'charts wide'});
    const table = Report.element('div');
    const root = Report.element('section', {id: 'before-after'}, Report.element('h2', {text: 'Before and after'}),
      Report.element('p', {
        class: 'blurb', text: 'The same configurations in two sources: below 1 the second is faster. Whiskers: quartiles over quartiles.',
      }),
      controls, summary, legend, charts, table);
    const draw = () => {
      const pick = (place) => (value) => { state[place] = value; draw(); };
      controls.replaceChildren(select('before', sources, state[0], pick(0)), select('after', sources, state[1], pick(1)));
      const matched = pairs(timed, state[0], state[1]);
      charts.replaceChildren();
      table.replaceChildren();
      legend.replaceChildren();
      if (!matched.length) {
        summary.textContent = 'These two share no configuration.';
        return;
      }
      const ratios = matched.map((row) => row.ratio);
      summary.textContent = `${matched.length} configurations: geometric mean ${Report.ratio(mean(ratios))}, `
        + `${matched.filter((row) => row.high < 1).length} faster, ${matched.filter((row) => row.low > 1).length} slower, `
        + 'the rest within noise.';
      const impls = Report.unique(matched.map((row) => row.impl)).sort(Report.bySeries);
      legend.replaceChildren(...impls.map((impl) => Report.legendEntry(impl, Report.look(impl))));
      const card = Report.element('div', {class: 'card'});
      charts.append(card);
      card.append(chart(matched, Math.max(260, card.clientWidth - 32)));
      table.append(Report.tableDetails(matched, COLUMNS()));
    };
    return {id: 'before-after', title: 'Before/after', root, draw};
  };
})();
